"""`forebay doctor`: measures the cache and the tiers of a configuration, and looks at the node they are on.

Owns its own probe files and nothing else: it takes no lock, opens no catalog, and asks no gateway. One file a kind of check;
what reads a tool's or the kernel's text is apart from what measures. What a running gateway says of its cache whoever calls has
asked it, and hands in.
"""

from forebay_gateway.core.errors import ForebayError
from forebay_gateway.core.quantities import parse_size
from forebay_gateway.doctor.report import Check, Frequency, Part, Report
from forebay_gateway.doctor.run import Options, Told, examine, sentence

__all__ = ["Check", "ForebayError", "Frequency", "Options", "Part", "Report", "Told", "examine", "parse_size", "sentence"]
