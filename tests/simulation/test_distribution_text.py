import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import (
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Normal,
    Pareto,
)
from coordinator.simulation.distribution_text import FORMS, distribution_of


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("constant(20ms)", Constant(0.02)),
        ("20ms", Constant(0.02)),
        ("0", Constant(0.0)),
        (0.5, Constant(0.5)),
        ("normal(50ms, 5ms)", Normal(0.05, 0.005)),
        ("exponential(30ms)", Exponential(0.03)),
        ("lognormal(50ms,0.4)", LogNormal(0.05, 0.4)),
        (" pareto(20ms,2.5) ", Pareto(0.02, 2.5)),
        ("empirical(20ms,25ms,1s)", Empirical((0.02, 0.025, 1.0))),
        (Exponential(1.0), Exponential(1.0)),
    ],
)
def test_a_text_or_a_number_stands_for_a_distribution(given, meant: Distribution) -> None:
    assert distribution_of("compute", given) == meant


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_messages_show_is_understood(form: str) -> None:
    assert distribution_of("compute", form).mean > 0


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("weibull(1s,2)", r"has no distribution 'weibull'; it may be one of constant\(20ms\)"),
        ("lognormal(50ms)", r"must be of the form lognormal\(50ms,0\.4\)"),
        ("lognormal(50,0.4)", r"must be a time of at least 0 with its unit, such as 200us, 50ms or 1\.5s, got '50'"),
        ("lognormal(50ms,x)", "has 'x' where a number without a unit is expected"),
        ("pareto(50ms,-1)", r"'pareto\(50ms,-1\)': shape of a distribution Pareto must be a number of at least 0"),
        ("constant(-5ms)", "must be a time of at least 0"),
        ("", "must be a time such as 20ms, or one of"),
        ("soon", "must be a time such as 20ms, or one of"),
        (-0.1, "must be a distribution, a text or seconds of at least 0, got -0.1"),
        (True, "must be a distribution"),
    ],
)
def test_what_stands_for_none_is_refused_with_the_option_and_what_is_allowed(given, complaint: str) -> None:
    with pytest.raises(SettingError, match=f"^compute {complaint}"):
        distribution_of("compute", given)
