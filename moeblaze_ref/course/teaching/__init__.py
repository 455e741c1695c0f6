"""What a lecturer needs beside the notebooks: nbgrader's form of the exercises, slides, and a quiz."""
