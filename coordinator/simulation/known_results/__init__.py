"""Published results, reproduced in virtual time: each class has `measure()`, and `draw()` for a picture.

`python -m coordinator.simulation.known_results FOLDER` measures all of them, prints a line about each, and draws them.
"""
