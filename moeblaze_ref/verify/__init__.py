"""Hard inputs, comparisons with the specification and with autograd, and the checker of a reader's kernel."""
