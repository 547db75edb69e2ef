"""What computes: the same four operations, once as a plain definition and once per kind of device."""
