"""Planning: pure stages from a batch to a plan. Never imports torch."""
