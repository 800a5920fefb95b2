"""Known results, reproduced in virtual time: each module has `measure()`, and `draw(measured)` for a picture.

`python -m coordinator.simulation.known_results FOLDER` measures all of them, says what came of each, and draws them.
"""
