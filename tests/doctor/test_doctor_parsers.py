"""What the doctor makes of the kernel's and the tools' texts, and what it thinks of the values. Nothing is measured here."""

import json
import re
from pathlib import Path

import pytest

from forebay.cli.doctor import doctor
from forebay_gateway.cache.mounts import Mount, mount_of
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.doctor import devices, fio, node, striping, wear
from forebay_gateway.doctor.filesystem import mount_check, space_checks, type_check
from forebay_gateway.doctor.frequency import Measured, highest
from forebay_gateway.doctor.report import CHECKS, Check, worst
from forebay_gateway.doctor.syncs import create_check, fsync_check
from forebay_gateway.doctor.tiers import posix_check, s3_checks, trip_check
from forebay_gateway.tiers.base import Capabilities

MIB, GIB = 1 << 20, 1 << 30

DISKSTATS = """\
 259       0 nvme0n1 1000 0 8000 500 2000 10 640000 4000 0 3000 4500 0 0 0 0 7 9
 259       1 nvme0n1p1 10 0 80 5 20 1 64 40 0 30 45
   8       0 short line
"""


def test_diskstats() -> None:
    found = devices.parse_diskstats(DISKSTATS)
    assert set(found) == {"nvme0n1", "nvme0n1p1"}
    assert found["nvme0n1"] == devices.DiskTimes(writes=2000, writing_ms=4000, busy_ms=3000)


def test_load_is_what_happened_between() -> None:
    before, after = devices.DiskTimes(100, 1000, 500), devices.DiskTimes(300, 5000, 2000)
    assert devices.load_between(before, after, 2.0) == devices.Load(busy=0.75, write_wait_s=0.02)
    assert devices.load_between(after, before, 2.0) == devices.Load(0.0, 0.0)  # a device that was replaced
    assert devices.load_between(before, before, 0.0) == devices.Load(0.0, 0.0)
    assert devices.load_between(before, after, 0.1).busy == 1.0


_A_BUSY_OR_SLOW_DISK_IS_TOLD: list[tuple[devices.Load | None, devices.Load | None, str]] = [
    (devices.Load(0.1, 0.0), devices.Load(1.0, 0.05), "OK"),
    (devices.Load(0.4, 0.0), devices.Load(1.0, 0.05), "WARN"),
    (devices.Load(0.1, 0.0), devices.Load(1.0, 0.15), "WARN"),
    (None, None, "OK"),
]


def test_a_busy_or_slow_disk_is_told() -> None:
    for before, during, status in _A_BUSY_OR_SLOW_DISK_IS_TOLD:
        check = devices.disk_check("cache", "vda", before, during)
        assert check.status == status and bool(check.do) == (status == "WARN")


def test_disks_below_partitions_and_volumes(tmp_path: Path) -> None:
    for disk, partition in (("nvme0n1", "nvme0n1p1"), ("sda", "sda2")):
        (tmp_path / "devices" / disk / partition).mkdir(parents=True)
        (tmp_path / "devices" / disk / partition / "partition").write_text("1\n")
        (tmp_path / disk).symlink_to(tmp_path / "devices" / disk)
        (tmp_path / partition).symlink_to(tmp_path / "devices" / disk / partition)
    for member in ("nvme0n1p1", "sda2"):
        (tmp_path / "dm-0" / "slaves" / member).mkdir(parents=True)
    assert devices.disks_under("sda2", tmp_path) == {"sda"}
    assert devices.disks_under("sda", tmp_path) == {"sda"}
    assert devices.disks_under("dm-0", tmp_path) == {"nvme0n1", "sda"}
    assert devices.disks_under("", tmp_path) == frozenset()
    numbered = devices.disks_of(tmp_path, "")  # no disk is to be seen: what lies on one file system still shares it
    assert len(numbered) == 1 and numbered == devices.disks_of(tmp_path / "dm-0", "")
    cache, far = frozenset({"vda"}), frozenset({"sda", "sdb"})
    assert devices.sharing(frozenset({"sdb"}), {"cache": cache, "pfs": far}) == ["pfs"]
    assert devices.sharing(frozenset(), {"cache": cache, "object": frozenset()}) == []


MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard,errors=remount-ro
30 27 259:1 / /mnt/with\\040space rw,noatime,nodiratime shared:5 - xfs /dev/nvme0n1p1 rw,attr2,inode64
31 27 0:44 / /lustre rw,noatime - lustre 10.0.0.1@tcp:/fs rw,flock
32 27 0:45 / /odd rw,noatime - tmpfs
"""


def test_mounts() -> None:
    assert mount_of(Path("/home/x"), MOUNTINFO).options == ("rw", "relatime", "discard", "errors=remount-ro")
    space = mount_of(Path("/mnt/with space/cache"), MOUNTINFO)
    assert (space.file_system, space.source, space.point) == ("xfs", "/dev/nvme0n1p1", Path("/mnt/with space"))
    assert mount_of(Path("/lustre/ckpt"), MOUNTINFO).source == "10.0.0.1@tcp:/fs"
    assert mount_of(Path("/odd"), MOUNTINFO) == Mount(Path("/odd"), "tmpfs", "", ("rw", "noatime"))


def mount(*options: str, kind: str = "ext4") -> Mount:
    return Mount(Path("/nvme"), kind, "/dev/nvme0n1", options)


_MOUNT_OPTIONS: list[tuple[tuple[str, ...], str]] = [
    (("rw", "noatime"), ""),
    (("rw", "noatime", "nodiratime", "discard=async"), ""),
    (("rw", "relatime"), "remount,noatime /nvme"),
    (("rw", "nodiratime"), "remount,noatime /nvme"),
    (("rw", "noatime", "discard"), "remount,nodiscard /nvme"),
    (("rw", "strictatime", "discard"), "remount,noatime,nodiscard /nvme"),
]


def test_mount_options() -> None:
    for options, remedy in _MOUNT_OPTIONS:
        check = mount_check("cache", mount(*options))
        assert (check.status == "WARN") == bool(remedy) and remedy in check.do and (remedy or not check.do)
        assert ("fstrim" in check.do) == ("nodiscard" in remedy)
        assert check.figures["options"] == ",".join(options)


_FILE_SYSTEMS: list[tuple[str, str, str]] = [
    ("cache", "ext4", "OK"),
    ("cache", "xfs", "OK"),
    ("cache", "btrfs", "WARN"),
    ("cache", "nfs4", "FAIL"),
    ("cache", "fuse.sshfs", "FAIL"),
    ("cache", "tmpfs", "FAIL"),
    ("posix", "lustre", "OK"),
    ("posix", "nfs4", "OK"),
    ("posix", "tmpfs", "FAIL"),
]


def test_file_systems() -> None:
    for where, name, status in _FILE_SYSTEMS:
        check = type_check("x", where, mount("rw", kind=name))
        assert check.status == status and check.figures["type"] == name and bool(check.do) == (status != "OK")


_SPACE_COUNTS_CHECKPOINTS: list[tuple[float, str]] = [(2.5, "WARN"), (1.5, "WARN"), (0.5, "FAIL"), (4.0, "OK")]


def test_space_counts_checkpoints(tmp_path: Path) -> None:
    for part, status in _SPACE_COUNTS_CHECKPOINTS:
        space = space_checks("cache", tmp_path, 8 * MIB, int(part * 8 * MIB))[0]
        assert space.status == status and space.figures["checkpoints"] == int(part)
        assert bool(space.do) == (status != "OK") and "cache.capacity" in space.do + "cache.capacity" * (status == "OK")
        assert int(space.figures["free_bytes"] or 0) <= int(space.figures["total_bytes"] or 0)


LFS = "stripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
LFS_PFL = """\
  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_extent.e_start: 0
    lcme_extent.e_end:   67108864
      stripe_count:  1       stripe_size:   1048576       pattern:       raid0       stripe_offset: -1
    lcme_extent.e_start: 67108864
    lcme_extent.e_end:   EOF
      stripe_count:  -1       stripe_size:   4194304       pattern:       raid0       stripe_offset: -1
"""
OSTS = (
    "OBDS::\n"
    + "".join(f"{number}: fs-OST{number:04x}_UUID ACTIVE\n" for number in range(16))
    + "16: fs-OST0010_UUID INACTIVE\n"
)
BEEGFS = """\
Entry type: directory
EntryID: root
Stripe pattern details:
+ Type: RAID0
+ Chunksize: 512K
+ Number of storage targets: desired: 4
+ Storage Pool: 1 (Default)
"""
TARGETS = "TargetID   NodeID\n========   ======\n" + "".join(f"     {number}        1\n" for number in range(1, 13))


def test_striping_texts() -> None:
    assert striping.parse_lfs(LFS) == striping.Striping(1, MIB)
    assert striping.parse_lfs(LFS_PFL) == striping.Striping(-1, 4 * MIB)
    assert striping.parse_lfs("lfs: cannot open") is None
    assert striping.count_osts(OSTS) == 16
    assert striping.parse_beegfs(BEEGFS) == striping.Striping(4, 512 << 10)
    assert striping.parse_beegfs("Unknown mode") is None
    assert striping.count_beegfs_targets(TARGETS) == 12


def tool(**answers: str) -> striping.Run:
    return lambda command: answers.get(command[1].strip("-"))


_LUSTRE_BY_NODES: list[tuple[int, str, str, str]] = [
    (1, LFS, "WARN", "lfs setstripe -c 16 -S 4M '/lustre/my ckpt'"),
    (4, LFS, "WARN", "lfs setstripe -c 4 -S 4M '/lustre/my ckpt'"),
    (16, LFS, "OK", "lfs setstripe -c 1 -S 4M '/lustre/my ckpt'"),
    (500, LFS, "OK", "lfs setstripe -c 1 -S 4M '/lustre/my ckpt'"),
    (1, LFS_PFL, "OK", "lfs setstripe -c 16 -S 4M '/lustre/my ckpt'"),
    (500, LFS_PFL, "WARN", "lfs setstripe -c 1 -S 4M '/lustre/my ckpt'"),
    (1, "", "WARN", "lfs setstripe -c 16 -S 4M '/lustre/my ckpt'"),
]


def test_lustre_by_nodes() -> None:
    for nodes, text, status, command in _LUSTRE_BY_NODES:
        check = striping.striping_check("pfs", Path("/lustre/my ckpt"), "lustre", nodes, tool(getstripe=text, osts=OSTS))
        assert check is not None and check.status == status and check.figures["command"] == command
        assert check.figures["targets"] == 16 and (command in check.do) == (status == "WARN")


def test_without_a_tool_the_command_is_still_said() -> None:
    check = striping.striping_check("pfs", Path("/lustre"), "lustre", 2, lambda command: None)
    assert check is not None and check.status == "WARN" and "unknown" in check.value
    assert check.figures["command"] == "lfs setstripe -c 4 -S 4M /lustre" and check.figures["targets"] is None


def test_beegfs_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    old = tool(getentryinfo=BEEGFS, listtargets=TARGETS)
    check = striping.striping_check("pfs", Path("/beegfs"), "beegfs", 2, old)
    assert check is not None and check.status == "WARN"  # 512 KiB
    assert check.figures["command"] == "beegfs-ctl --setpattern --numtargets=6 --chunksize=4m /beegfs"
    monkeypatch.setattr("shutil.which", lambda name: "/sbin/beegfs" if name == "beegfs" else None)
    new = striping.striping_check("pfs", Path("/beegfs"), "beegfs", 4, tool(entry=BEEGFS.replace("512K", "4M")))
    assert new is not None and new.status == "OK"
    assert new.figures["command"] == "beegfs entry set --num-targets=2 --chunk-size=4MiB /beegfs"


def test_other_file_systems_do_not_stripe() -> None:
    assert striping.striping_check("pfs", Path("/nfs"), "nfs4", 4, lambda command: None) is None


NVME = {"nvme_smart_health_information_log": {"percentage_used": 12, "data_units_written": 1000, "critical_warning": 0}}


_WORN_DISKS: list[tuple[int, int, str]] = [(12, 0, "OK"), (85, 0, "WARN"), (100, 0, "FAIL"), (12, 4, "FAIL")]


def test_worn_disks() -> None:
    for used, warning, status in _WORN_DISKS:
        text = json.dumps({"percent_used": used, "critical_warning": warning, "data_units_written": 1})
        check = wear.wear_check("cache", "nvme0n1", lambda command, text=text: text if command[0] == "nvme" else None)  # type: ignore[misc]
        assert check.status == status and check.figures["used"] == used / 100


def test_wear_that_nobody_tells() -> None:
    assert wear.wear_check("cache", "nvme0n1", lambda command: None).status == "WARN"
    assert wear.wear_check("cache", "vda", lambda command: None).status == "OK"


SNMP = "Ip: Forwarding DefaultTTL\nIp: 1 64\nTcp: RtoAlgorithm OutSegs RetransSegs\nTcp: 1 {sent} {again}\nUdp: A\nUdp: 1\n"


_TCP: list[tuple[int, int, str]] = [(10_000, 50, "OK"), (10_000, 200, "WARN"), (900, 90, "OK"), (0, 0, "OK")]


def test_tcp() -> None:
    for sent, again, status in _TCP:
        before = node.parse_snmp(SNMP.format(sent=5, again=1))
        check = node.tcp_check(before, node.parse_snmp(SNMP.format(sent=5 + sent, again=1 + again)))
        assert check.status == status and (check.figures["sent"], check.figures["retransmitted"]) == (sent, again)
        assert node.parse_snmp("Tcp: OutSegs\n") is None and node.parse_snmp("Tcp: A\nTcp: 1\n") is None
        assert node.tcp_check(None, before).figures["sent"] is None


VM = {"dirty_ratio": 20, "dirty_background_ratio": 10, "dirty_bytes": 0, "dirty_background_bytes": 0}


def test_dirty_pages() -> None:
    good = node.dirty_check(VM, 16 * GIB, 1.0 * GIB)
    assert good.status == "OK" and good.figures["dirty_bytes"] == 16 * GIB * 20 // 100 and not good.do
    slow = node.dirty_check(VM, 1024 * GIB, 1.0 * GIB)
    assert slow.status == "WARN"
    assert slow.do.startswith(f"sysctl -w vm.dirty_bytes={5 * GIB} vm.dirty_background_bytes={5 * GIB // 4}")
    by_bytes = node.dirty_check(VM | {"dirty_bytes": GIB, "dirty_background_bytes": MIB}, 1024 * GIB, 1.0 * GIB)
    assert by_bytes.status == "OK" and by_bytes.figures["background_bytes"] == MIB
    assert node.dirty_check(VM, 1024 * GIB, None).figures["flush_s"] is None
    assert node.dirty_check(None, 0, 1.0).figures["dirty_bytes"] is None
    assert node.parse_available("MemTotal: 8 kB\nMemAvailable:   1024 kB\n") == MIB and node.parse_available("") == 0


_OPEN_FILES: list[tuple[int, str]] = [(1024, "WARN"), (65536, "OK"), (-1, "OK")]


def test_open_files() -> None:
    for soft, status in _OPEN_FILES:
        assert node.open_files_check((soft, 65536)).status == status


def test_who_can_reach_the_gateway() -> None:
    wide = node.listen_check(["unix:///g.sock", "0.0.0.0:7400", "127.0.0.1:7401"])
    assert wide.status == "WARN" and "0.0.0.0:7400" in wide.value and wide.do
    assert wide.figures == {"ports": "0.0.0.0:7400, 127.0.0.1:7401"}
    local = node.listen_check(["127.0.0.1:7401"])
    assert local.status == "OK" and "every user of this host" in local.value and not local.do
    assert node.listen_check(["unix:///g.sock"]).figures == {"ports": ""}


def test_sample_data() -> None:
    assert node.sample_data_check(Path("/data"), ["cache"]).status == "WARN"
    assert node.sample_data_check(Path("/data"), []).status == "OK"


def test_slow_small_acts() -> None:
    assert fsync_check("cache", [0.001] * 9 + [0.5]).status == "OK"  # the median
    assert fsync_check("cache", [0.05] * 9).status == "WARN"
    assert create_check("pfs", 1000.0).status == "OK" and create_check("pfs", 20.0).status == "WARN"
    assert trip_check("object", [0.02] * 3).status == "OK" and trip_check("object", [0.9] * 3).status == "WARN"


FIO = {"jobs": [{"error": 0, "write": {"io_bytes": 8 * MIB, "runtime": 500}}]}


def test_fio_answers() -> None:
    assert fio.parse("note: a warning first\n" + json.dumps(FIO)) == 16 * MIB
    for broken in ("", "{}", '{"jobs": []}', json.dumps({"jobs": [{"error": 28, "write": {"io_bytes": 1, "runtime": 1}}]})):
        with pytest.raises(fio.FioFailed):
            fio.parse(broken)
    with pytest.raises(fio.FioFailed, match="nothing"):
        fio.parse(json.dumps({"jobs": [{"error": 0, "write": {"io_bytes": 0, "runtime": 5}}]}))


def capabilities(**changes: object) -> Capabilities:
    names = (
        "conditional_create",
        "conditional_replace",
        "server_checksum",
        "multipart",
        "list_after_put",
        "links",
        "direct_io",
    )
    values = dict.fromkeys(names, True) | {"clock_skew_s": 0.2, "notes": {"put_checksum": "crc32c"}} | changes
    return Capabilities(**values)  # type: ignore[arg-type]


OBJECT = TierConfig(name="object", kind="s3", bucket="b")


_AN_OBJECT_STORES_RECORD: list[tuple[dict[str, object], str, str, str]] = [
    ({}, "conditional_create", "OK", "create and replace"),
    ({"conditional_create": False, "notes": {"no_conditional_create": "ignored"}}, "conditional_create", "FAIL", "ignored"),
    ({"conditional_replace": False}, "conditional_create", "WARN", "no replace"),
    ({}, "checksums", "OK", "CRC32C of a put and CRC32C of a full"),
    ({"server_checksum": False, "notes": {"no_server_checksum": "composite"}}, "checksums", "WARN", "composite"),
    ({"list_after_put": False}, "list_after_put", "WARN", "not listed"),
    ({"clock_skew_s": -30.0}, "clock_skew", "WARN", "-30.0 s"),
    ({"clock_skew_s": 1000.0}, "clock_skew", "FAIL", "+1000.0 s"),
    ({"clock_skew_s": None}, "clock_skew", "OK", "no time"),
    ({}, "multipart", "OK", "10,000 parts; 1.0 GiB goes in 64 of 16.0 MiB"),
    ({"multipart": False}, "multipart", "WARN", "none"),
]


def test_an_object_stores_record() -> None:
    for changes, name, status, said in _AN_OBJECT_STORES_RECORD:
        checks = {check.check: check for check in s3_checks(OBJECT, capabilities(**changes), GIB)}
        assert set(checks) == {"conditional_create", "checksums", "list_after_put", "clock_skew", "multipart"}
        assert checks[name].status == status and said in checks[name].value
        assert bool(checks[name].do) == (status != "OK")


_A_POSIX_TIERS_RECORD: list[tuple[dict[str, object], str]] = [
    ({}, "OK"),
    ({"links": False}, "WARN"),
    ({"direct_io": False}, "WARN"),
    ({"conditional_create": False}, "FAIL"),
]


def test_a_posix_tiers_record() -> None:
    for changes, status in _A_POSIX_TIERS_RECORD:
        assert posix_check("pfs", capabilities(**changes), 0.1).status == status


# -- how often -------------------------------------------------------------------------------------------------------------


def test_the_busiest_place_bounds() -> None:
    places = [
        Measured("cache", 1000.0, 1000.0, disks=frozenset({"nvme0n1"})),
        Measured("pfs", 100.0, 100.0),
        Measured("object", 125.0, None),
    ]
    found = highest(places, 1000)
    assert found.bounded_by == "pfs" and found.interval_s == 20.0 and found.per_hour == 180.0 and found.bytes_per_s == 50.0
    assert [(part.name, part.seconds) for part in found.parts] == [("cache", 2.0), ("pfs", 20.0), ("object", 8.0)]


def test_places_on_one_disk_take_turns() -> None:
    places = [
        Measured("cache", 100.0, 100.0, disks=frozenset({"vda"})),
        Measured("pfs", 100.0, 100.0, disks=frozenset({"vda"})),
        Measured("object", 30.0, None),
    ]
    found = highest(places, 1000)
    assert found.interval_s == 40.0 and found.bounded_by == "cache+pfs" and "take turns on vda" in found.reason


def test_a_limit_of_the_configuration_bounds() -> None:
    found = highest([Measured("cache", 1000.0, None), Measured("object", 1000.0, None, limit=10.0)], 1000)
    assert found.interval_s == 100.0 and found.bounded_by == "object"


def test_without_a_required_place_nothing_is_carried() -> None:
    found = highest([Measured("cache", 1000.0, None), Measured("pfs", None, None)], 1000)
    assert found.interval_s is None and found.bounded_by == "pfs" and "could not be measured" in found.reason
    spared = highest([Measured("cache", 1000.0, None), Measured("pfs", None, None, required=False)], 1000)
    assert spared.interval_s == 1.0 and "without pfs" in spared.reason
    assert highest([], 1000).interval_s is None


# -- what is documented ----------------------------------------------------------------------------------------------------


def test_the_help_names_every_check_and_figure() -> None:
    text = re.sub(r"\s+", " ", doctor.__doc__ or "").partition("Checks and their figures: ")[2].rstrip(" .")
    told = {
        name: tuple(filter(None, figures.split(", ")))
        for name, _, figures in (entry.partition(": ") for entry in text.split("; "))
    }
    assert told == CHECKS


def test_a_check_has_all_its_figures_and_no_other() -> None:
    assert Check("cache", "read", "OK", "", "").figures == {"bytes_per_s": None, "direct": None}
    with pytest.raises(ValueError, match="no figures"):
        Check("cache", "read", "OK", "", "", "", {"other": 1})


def test_the_worst_counts() -> None:
    ok, warn, fail = (Check("cache", "path", status, "", "") for status in ("OK", "WARN", "FAIL"))  # type: ignore[arg-type]
    assert (worst([ok]), worst([ok, warn]), worst([warn, fail, ok])) == ("OK", "WARN", "FAIL")
