from .epochs import Epochs as Epochs
from .epochs import EpochsStatistics as EpochsStatistics
from .files import lines as lines
from .files import records as records
from .files import rows as rows
from .source import Source as Source
from .source import arrays as arrays
from .source import client as client
