"""Prints constraints for pip: of each requirement in pyproject.toml the oldest version that it allows.

`>=1.6` becomes `~=1.6.0`: the newest patch of the oldest minor version. TensorFlow, Keras and `tf_keras`, whose
versions are given to `.ci/matrix`, are left out.
"""

import pathlib
import re

text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
for name, version, marker in re.findall(r'"([\w-]+)>=([\d.]+)[^;"]*(;[^"]*)?"', text):
    if name not in ("tensorflow", "keras", "tf_keras"):
        patch = ".0" * (2 - version.count("."))
        print(f"{name}~={version}{patch}{marker}")
