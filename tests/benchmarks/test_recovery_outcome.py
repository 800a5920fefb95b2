"""The outcome of a fault is derived from the events of a client; many outcomes are summarized in words.

events after the fault                   outcome
a step that was waited for               its seconds
an error, then nothing, for long enough  the error
an error, then a step                    the seconds, and the error
an error, then steps of others alone     it hangs
nothing until the limit                  it hangs
nothing yet                              open
"""

import pytest

from benchmarks.recovery_outcome import PATIENCE, Event, Outcome, judge, median, ratio, summary

HURT_AT, SINCE, LIMIT = 100.0, 105.0, 60.0
STEP = Event("step", 108.0, began=107.0, worker=1)
ERROR = Event("raised", 106.0, error="UnavailableError")
LATER_ERROR = Event("raised", 109.0, error="UnavailableError")
OLD_ERROR = Event("raised", 99.0, error="UnavailableError")
ENDED = Event("ended", 106.0, error="an end of the client with code -11")


def judged(events, now):
    return judge(events, lambda event: event.kind == "step", hurt_at=HURT_AT, since=SINCE, now=now, limit=LIMIT)


@pytest.mark.parametrize(
    ("events", "now", "expected"),
    [
        ([], SINCE, None),
        ([], SINCE + LIMIT, Outcome()),
        ([STEP], 109.0, Outcome(3.0)),
        ([ERROR], 107.0, None),
        ([ERROR], 106.0 + PATIENCE, Outcome(error="UnavailableError")),
        ([ENDED], 106.0 + PATIENCE, Outcome(error="an end of the client with code -11")),
        ([ERROR, STEP], 109.0, Outcome(3.0, "UnavailableError")),
        ([STEP, LATER_ERROR], 110.0, Outcome(3.0)),
        ([OLD_ERROR, STEP], 109.0, Outcome(3.0)),
        ([OLD_ERROR], SINCE + LIMIT, Outcome()),
    ],
)
def test_the_outcome_of_a_fault_is_derived_from_events(events, now, expected):
    assert judged(events, now) == expected


OTHER = Event("held", 112.0, began=111.0, worker=2)
STALE = Event("held", 112.0, began=103.0, worker=2)


def test_an_error_is_not_final_while_other_workers_continue():
    assert judged([ERROR, OTHER], 106.0 + PATIENCE) is None
    assert judged([ERROR, OTHER], SINCE + LIMIT) == Outcome()


def test_steps_begun_before_an_error_do_not_show_that_others_continue():
    assert judged([ERROR, STALE], 106.0 + PATIENCE) == Outcome(error="UnavailableError")


def test_the_time_limit_starts_when_the_step_becomes_possible():
    early = Event("raised", HURT_AT + 1, error="UnavailableError")
    assert judged([early], SINCE + PATIENCE - 1) is None
    assert judged([early], SINCE + PATIENCE) == Outcome(error="UnavailableError")


def test_a_step_that_came_before_it_was_waited_for_took_no_time():
    assert judged([Event("step", 104.0, began=103.0, worker=0)], 106.0) == Outcome(0.0)


HANGS, RAISES = Outcome(), Outcome(error="UnavailableError")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Outcome(1.0), Outcome(9.0), Outcome(2.0)], "2.00 s"),
        ([HANGS, HANGS], "hangs (deadline 60 s)"),
        ([RAISES, RAISES], "raises UnavailableError; restart the client"),
        ([Outcome(1.0), HANGS, HANGS], "1.00 s; 2 of 3 hangs (deadline 60 s)"),
        ([Outcome(1.0, "UnavailableError")], "1.00 s, raises UnavailableError"),
    ],
)
def test_a_summary_hides_no_repeat(outcomes, expected):
    assert summary(outcomes, LIMIT) == expected


@pytest.mark.parametrize(
    ("ours", "peer", "expected"),
    [
        ([Outcome(2.0)], [Outcome(3.0)], "1.50"),
        ([Outcome(2.0)], [HANGS, HANGS], "> 30"),
        ([Outcome(2.0)], [RAISES], "-"),
        ([Outcome(2.0)], [Outcome(1.0), HANGS], "-"),
        ([HANGS], [Outcome(1.0)], "-"),
        ([Outcome(0.0)], [Outcome(1.0)], "-"),
    ],
)
def test_a_ratio_is_given_only_where_it_is_meaningful(ours, peer, expected):
    assert ratio(ours, peer, LIMIT) == expected


def test_a_median_is_of_the_repeats_with_a_step():
    assert median([Outcome(1.0), HANGS, Outcome(2.0)]) == 1.5
    assert median([RAISES]) is None


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(1.234), "1.23 s"),
        (Outcome(1.0, "UnavailableError"), "1.00 s, raises UnavailableError"),
        (RAISES, "raises UnavailableError"),
        (HANGS, "hangs"),
    ],
)
def test_the_text_of_an_outcome_has_seconds_or_error(outcome, expected):
    assert str(outcome) == expected
