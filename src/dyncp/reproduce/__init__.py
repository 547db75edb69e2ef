"""The published figures, made again on synthetic batches and a modelled cluster."""
