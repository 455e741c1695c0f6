"""What the notebooks, the exercises and the site are made with."""
