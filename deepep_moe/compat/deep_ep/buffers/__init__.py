"""`deep_ep.buffers`, where version 2 has its classes."""
