"""Keeps the pauses of Python's garbage collection short while a strategy is open.

A full collection holds the interpreter's lock, so that no thread gives its worker anything meanwhile. It looks at all
objects: TensorFlow and Keras alone have 400,000, which takes 0.2 s. Python starts one when the number of objects has
grown by a quarter, as it does while functions are traced. But what modules hold is never garbage.
"""

import gc
import weakref
from typing import Any


class BriefCollections:
    """Base class. The objects that exist before one of the class are not searched for garbage until it ends.

    What becomes unreachable among them is still freed, unless it is part of a cycle, which waits. A program that has
    called `gc.freeze` itself is left as it is.

    Attributes:
      end_brief_collections: has all objects searched again; called when this object is forgotten, if not before.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Creates the object, which is not excluded itself: it must be found when it is forgotten."""
        is_own = gc.get_freeze_count() == 0
        if is_own:
            gc.freeze()
        created: Any = super().__new__(cls)
        created.end_brief_collections = weakref.finalize(created, gc.unfreeze if is_own else int)
        return created
