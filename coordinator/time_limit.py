"""A time limit for code on an asyncio loop."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """A scope that is cancelled after `seconds`, and then raises TimeoutError."""
    try:
        async with timeout(seconds):
            yield
    # Before Python 3.11 this is another class than `TimeoutError`.
    except asyncio.TimeoutError as error:
        raise TimeoutError from error
