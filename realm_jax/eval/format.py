"""Numbers as people write them: shares, probabilities, times."""

import math


def share(value: float) -> str:
    """Return a share of questions as text: two decimals, or more if two would round it to 0 or 1."""
    rounded = (f"{value:.{decimals}f}" for decimals in (2, 3, 4))
    return next((shown for shown in rounded if float(shown) not in (0, 1)), f"{value:.2f}")


def probability(value: float) -> str:
    """Return a probability as text: 0.129, or 1.1 × 10⁻¹⁴ and > 0.999 if three decimals would round it to 0 or 1."""
    if not math.isfinite(value) or value == 0 or value >= 0.001:
        return "> 0.999" if 0.9995 <= value < 1 else f"{value:.3f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def duration(seconds: float | None) -> str:
    """Return a time as text: 3.21 s, 6 min 53 s, 1 h 2 min; – if it is unknown."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
