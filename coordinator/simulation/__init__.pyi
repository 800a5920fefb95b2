import coordinator.errors

from .distribution import Constant as Constant
from .distribution import Distribution as Distribution
from .distribution import Empirical as Empirical
from .distribution import Exponential as Exponential
from .distribution import LogNormal as LogNormal
from .distribution import Normal as Normal
from .distribution import Pareto as Pareto
from .learning import Learning as Learning
from .problem import LogisticRegression as LogisticRegression
from .problem import Problem as Problem
from .problem import SmallNetwork as SmallNetwork
from .random_delay import RandomDelay as RandomDelay
from .result import Result as Result
from .rule import Rule as Rule
from .rules import Asynchronous as Asynchronous
from .rules import BoundedDelay as BoundedDelay
from .rules import Delayed as Delayed
from .rules import ModelAverage as ModelAverage
from .rules import StaleSynchronous as StaleSynchronous
from .rules import Synchronous as Synchronous
from .setting import Setting as Setting
from .simulated_cluster import simulate as simulate
from .simulated_worker import Death as Death
from .simulated_worker import Pause as Pause

SettingError = coordinator.errors.SettingError
