"""Exchanges in two halves with GEMMs between them."""
