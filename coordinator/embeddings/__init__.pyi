from .rowwise_adagrad import RowwiseAdagrad as RowwiseAdagrad
