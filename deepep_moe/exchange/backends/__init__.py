"""Ways to move rows between ranks, behind one protocol."""
