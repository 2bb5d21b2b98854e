"""The ``format``s of JSON Schema that grammars enforce, as patterns of the whole text. If a standard leaves a choice
that not all parsers accept (leap seconds, a lower-case ``t`` or ``z``), grammars write the form that all accept.
"""

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_OF_FOUR = "(?:0[48]|[2468][048]|[13579][26])"  # multiples of four below a hundred, without zero
_LEAP_YEAR = f"(?:[0-9]{{2}}{_OF_FOUR}|{_OF_FOUR}00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_COUNT = "[0-9]{1,9}"
_TIME_SPAN = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DATE_SPAN = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,32}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _groups(least: int, most: int) -> str:
    """Returns the pattern of ``least`` to ``most`` groups of an IPv6 address, separated by colons."""
    some = f"{_GROUP}(?::{_GROUP}){{{max(least, 1) - 1},{most - 1}}}" if most else ""
    return f"(?:{some})?" if most and not least else some


_SHORTENED = "|".join(f"{_groups(before, before)}::{_groups(0, 7 - before)}" for before in range(8))
_IPV6 = f"(?:{_GROUP}(?::{_GROUP}){{7}}|{_SHORTENED})"
_ENCODED = "%[0-9A-Fa-f]{2}"
_PATH = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ENCODED})"
_AUTHORITY = (
    f"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ENCODED})*@)?"
    rf"(?:\[{_IPV6}\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_ENCODED})*)(?::[0-9]{{0,5}})?"
)
_QUERY = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_ENCODED})*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_COUNT}W|{_DATE_SPAN}(?:{_TIME_SPAN})?|{_TIME_SPAN})",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,1}}@{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PATH}*)*|/(?:{_PATH}+(?:/{_PATH}*)*)?"
    rf"|{_PATH}+(?:/{_PATH}*)*|)(?:\?{_QUERY})?(?:#{_QUERY})?",
}
