from .arrays import arrays as arrays
from .epochs import Epochs as Epochs
from .ledger import EpochsStatistics as EpochsStatistics
from .source import Source as Source
