"""The layers as torch modules, and plain torch's oracle."""
