"""What to expect of each strategy, and which settings to use, before anything is trained."""
