"""What a layer loses to unbalanced ranks."""
