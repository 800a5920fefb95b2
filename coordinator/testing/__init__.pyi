from .chaos import Chaos as Chaos
from .fake_runtime import FakeRuntime as FakeRuntime
from .local_cluster import LocalCluster as LocalCluster
from .status_server import StatusServer as StatusServer
