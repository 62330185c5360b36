from forebay.demo.seaweedfs import *  # noqa: F403
from forebay.demo.seaweedfs import SeaweedFS, free_ports, weed_binary  # noqa: F401
