"""The parts of lowering: what is known before the walk over the steps, the program that grows, and the walk."""
