"""What people look at: figures, tables and pictures of a plan."""
