"""What runs beside a reader's torch code in confined processes: it has the inputs, and knows nothing that is right.

A module here belongs to a kind of project: `function` runs the two halves of an ``autograd.Function`` in two processes,
`counter` asks for the saved bytes of layers, `graph` traces a layer without data and replays the trace, `router` trains
a bias. What is right is computed and compared by `moeblaze_ref.course.exercises.projects`, in the process that asks.
Arrays go in as numpy's, and come out as JSON (`messages`): nothing that a reader's process sends is unpickled.
"""

from moeblaze_ref.verify.torch_cells import counter, function, graph, router
from moeblaze_ref.verify.torch_cells.cell import Cell

__all__ = ["Cell", "counter", "function", "graph", "router"]
