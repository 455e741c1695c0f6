"""A small MoE language model, whose activations and routing are the project's real input.

``data`` is English text that every Python carries, ``model`` the transformer, ``train`` its
training and the capture of what its MoE layers saw.
"""
