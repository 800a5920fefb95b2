"""Published results, reproduced in virtual time: each module has `measure()`, and `draw(measured)` for a picture.

`python -m coordinator.simulation.known_results FOLDER` measures all of them, prints a line about each, and draws them.
"""
