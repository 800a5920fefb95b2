"""What `coordinator run --hosts` has to know of a host before it starts servers there: it runs this module there.

python -m coordinator.launch.host_report COUNT    prints the report of a host that is to have COUNT servers
"""

import dataclasses
import importlib.metadata
import json
import os
import sys

from coordinator.addresses import parse_address
from coordinator.launch.gpus import visible_gpus
from coordinator.launch.local_servers import free_addresses
from coordinator.version import __version__


@dataclasses.dataclass(frozen=True)
class HostReport:
    """A host.

    Attributes:
      versions: of this package and of TensorFlow.
      ports: free ones.
      gpus: as `CUDA_VISIBLE_DEVICES` names them.
    """

    versions: str
    ports: list[int]
    gpus: list[str]


def installed_versions() -> str:
    """Returns the versions of this package and of TensorFlow on this machine."""
    return f"coordinator {__version__}, TensorFlow {importlib.metadata.version('tensorflow')}"


if __name__ == "__main__":
    report = HostReport(
        versions=installed_versions(),
        ports=[parse_address(address).port for address in free_addresses(int(sys.argv[1]))],
        gpus=visible_gpus(os.environ),
    )
    print(json.dumps(dataclasses.asdict(report)))
