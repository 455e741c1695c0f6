"""Helpers of the notebooks, the exercises and the site."""
