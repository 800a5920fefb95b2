import os
import queue
import signal
import threading

from coordinator.launch.serve import SignalReader

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def test_each_signal_is_reported_while_the_main_thread_waits() -> None:
    received: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    threads = []
    with SignalReader(SIGNALS, lambda number: (received.put(number), threads.append(threading.current_thread().name))):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
            assert received.get(timeout=10) is number
    assert threads == ["coordinator-signals"] * 2


def test_afterwards_signals_do_what_they_did_before() -> None:
    found = signal.signal(signal.SIGUSR1, handler := lambda *_: None)
    with SignalReader(SIGNALS, lambda number: None):
        assert signal.getsignal(signal.SIGUSR1) is not handler
    assert signal.signal(signal.SIGUSR1, found) is handler
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_an_ignored_signal_stays_ignored() -> None:
    found = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    received: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    with SignalReader(SIGNALS, received.put):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert received.get(timeout=10) is signal.SIGUSR2
    signal.signal(signal.SIGUSR1, found)
