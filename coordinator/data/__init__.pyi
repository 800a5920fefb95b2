from .arrays import arrays as arrays
from .client import client as client
from .epochs import Epochs as Epochs
from .ledger import EpochsStatistics as EpochsStatistics
from .lines import lines as lines
from .records import records as records
from .rows import rows as rows
from .source import Source as Source
