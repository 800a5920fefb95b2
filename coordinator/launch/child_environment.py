"""What the environment of a child process must hold: a function of what it is to be and of what it inherits."""

import os
import pathlib
import sysconfig
from collections.abc import Mapping

from coordinator.launch.task_config import TaskConfig


def server_environment(inherited: Mapping[str, str], config: TaskConfig) -> dict[str, str]:
    """Returns the environment of a server process.

    Args:
      inherited: the environment of this process.
      config: the server to be.
    """
    environment = program_environment(inherited, config)
    if folders := _import_path(inherited.get("PYTHONPATH", "")):
        environment["PYTHONPATH"] = folders
    if config.job == "ps":
        # Variables live in the memory of the host; a parameter server would only take the GPU from the workers.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def program_environment(inherited: Mapping[str, str], config: TaskConfig) -> dict[str, str]:
    """Returns the environment of the user's program in one role.

    Args:
      inherited: the environment of this process.
      config: the role.
    """
    environment = dict(inherited)
    environment["TF_CONFIG"] = config.to_json()
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return environment


def _import_path(inherited: str) -> str:
    """Adds the folder that this package was loaded from, unless it is installed: the child must find the same one."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    # An installed package is found anyway; a site-packages folder on PYTHONPATH would go before the standard library.
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return inherited
    return os.pathsep.join(filter(None, [root, inherited]))
