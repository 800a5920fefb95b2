import coordinator.errors

from .distribution import Constant as Constant
from .distribution import Distribution as Distribution
from .distribution import Empirical as Empirical
from .distribution import Exponential as Exponential
from .distribution import LogNormal as LogNormal
from .distribution import Normal as Normal
from .distribution import Pareto as Pareto
from .distribution import RandomDelay as RandomDelay
from .learning import Learning as Learning
from .learning import LogisticRegression as LogisticRegression
from .learning import Problem as Problem
from .learning import SmallNetwork as SmallNetwork
from .result import Result as Result
from .rules import Asynchronous as Asynchronous
from .rules import BoundedDelay as BoundedDelay
from .rules import Delayed as Delayed
from .rules import ModelAverage as ModelAverage
from .rules import Rule as Rule
from .rules import StaleSynchronous as StaleSynchronous
from .rules import Synchronous as Synchronous
from .setting import Setting as Setting
from .simulated_cluster import simulate as simulate
from .simulated_tasks import Death as Death
from .simulated_tasks import Pause as Pause

SettingError = coordinator.errors.SettingError
