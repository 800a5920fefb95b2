from .sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
from .sidecar_metrics import SidecarMetrics as SidecarMetrics
from .status_files import EvaluationResult as EvaluationResult
from .status_files import best_result as best_result
from .status_files import latest_result as latest_result
from .status_files import mark_training_finished as mark_training_finished
from .status_files import mark_training_started as mark_training_started
from .status_files import results as results
