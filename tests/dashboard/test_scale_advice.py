"""The advice about the number of workers, computed from made loads in no time."""

import pytest

from coordinator.dashboard.scale_advice import Load, Resource, expected_rates, scale_advice

FREE = Resource("parameter server 0", 0.0)


def test_workers_that_share_nothing_add_up() -> None:
    assert expected_rates(Load(2, 20.0, [FREE]), 4) == pytest.approx([10.0, 20.0, 30.0, 40.0], rel=1e-4)
    advice = scale_advice(Load(4, 40.0, [FREE]))
    assert (advice.workers, advice.target) == (4, 16)
    assert advice.text == "2 more workers would bring 50%; parameter server 0 is the busiest (0%)."


def test_rates_are_those_of_the_machine_repair_model() -> None:
    # One server, exponential times: think 30 ms, service 10 ms, whose rate is known (Lazowska et al., chapter 6).
    def rate(workers: int) -> float:
        term, terms = 1.0, [1.0]
        for k in range(1, workers + 1):
            term *= (workers - k + 1) * 10.0 / 30.0
            terms.append(term)
        return (1 - 1 / sum(terms)) / 0.010

    load = Load(3, rate(3), [Resource("parameter server 0", 0.010 * rate(3))])
    assert expected_rates(load, 8) == pytest.approx([rate(workers) for workers in range(1, 9)], rel=1e-3)


def test_the_rate_is_at_most_what_the_processors_of_a_host_can_do() -> None:
    # Two workers make 45 steps per second, each of which takes 40 ms of two processors, 18 ms of them in the server.
    load = Load(2, 45.0, [Resource("the processors of host a", 0.9), Resource("parameter server 0", 0.405)])
    rates = expected_rates(load, 32)
    assert rates[1] == pytest.approx(45.0)
    assert max(rates) == pytest.approx(50.0)
    assert scale_advice(load).text.endswith("; the processors of host a are the bottleneck (90%).")


def test_a_program_that_schedules_too_little_is_told_so() -> None:
    advice = scale_advice(Load(4, 40.0, [FREE], idle=0.5, waiting=0))
    assert (advice.target, advice.bottleneck, advice.expected[8]) == (2, "the program", 40.0)
    assert advice.text.startswith("More workers would bring nothing: the workers are idle 50% of the time")
    # What waits could run on more workers, and a busy client cannot schedule more.
    assert scale_advice(Load(4, 40.0, [FREE], idle=0.5, waiting=3)).bottleneck == "parameter server 0"
    assert scale_advice(Load(4, 40.0, [Resource("the client", 0.9)], idle=0.5, waiting=0)).bottleneck == "the client"
