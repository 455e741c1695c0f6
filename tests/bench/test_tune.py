"""The table of tiles and the command that makes it: classes, choices, argument checks, and a pretended run."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from pretended import PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.bench import tune
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.config import MoEConfig, preset
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.torch_bridge import CpuBridge

TINY = MoEConfig(L=40, d=16, h=24, E=3, k=2)
LAYER = (2**20, 16, 1024, 4096)  # R, E, d, h: long groups, small weights
WIDE = tiles.CANDIDATES["3_mma"][1]


class OnGpu:
    """As much of an executor as the choice of a tile looks at."""

    name = "cuda"
    capability = (9, 0)


def entry(**changes):
    of_entry = {"version": "3_mma", "kernel": "d_w", "groups": "long", "weights": "small", "gain": 1.2}
    return of_entry | {"tile": tile_as_json(WIDE)} | changes


def tile_as_json(tile):
    return json.loads(json.dumps(vars(tile)))


def run(capability="9.0", entries=None):
    place = {"device": "a GPU", "clocks": None, "versions": {}, "commit": "none"}
    return place | {"capability": capability, "entries": [entry()] if entries is None else entries}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Puts a table into the place of the committed one."""
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(tiles, "TABLE", path)

    def put(content):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        tiles._table.cache_clear()
        return path

    yield put
    tiles._table.cache_clear()


# ---- the choice --------------------------------------------------------------------------------


def test_the_table_is_asked_for_this_gpu_version_kernel_and_class_of_layers(table):
    table({"runs": [run("8.0", []), run()]})
    assert tiles.choose(OnGpu(), "3_mma", "d_w", *LAYER) == WIDE


def test_a_layer_on_a_cpu_has_smaller_tiles_than_the_check_of_its_kernels():
    layers, checks = CpuBridge().executor, SimtExecutor()
    assert tiles.choose(layers, "3_mma", "d_w", *LAYER) == tiles.CPU_TILE
    assert tiles.choose(checks, "3_mma", "d_w", *LAYER) == tiles.DEFAULTS["3_mma"]
    assert tiles.choose(layers, "7_persistent", "d_w", *LAYER) == tiles.DEFAULTS["7_persistent"]
    assert tiles.CPU_TILE.columns == tiles.DEFAULTS["3_mma"].columns, "the accounting of gate_terms has the default's"


@pytest.mark.parametrize(
    ("tuned", "executor", "version", "kernel", "layer"),
    [
        ("9.0", SimtExecutor(), "3_mma", "d_w", LAYER),
        ("9.0", OnGpu(), "3_mma_tf32", "d_w", LAYER),
        ("9.0", OnGpu(), "3_mma", "d_w3", LAYER),
        ("9.0", OnGpu(), "3_mma", "d_w", (16, *LAYER[1:])),
        ("9.0", OnGpu(), "3_mma", "d_w", (*LAYER[:3], 2**14)),
        ("8.0", OnGpu(), "3_mma", "d_w", LAYER),  # another GPU
    ],
)
def test_what_the_table_does_not_name_gets_the_default(table, tuned, executor, version, kernel, layer):
    table({"runs": [run(tuned)]})
    assert tiles.choose(executor, version, kernel, *layer) == tiles.DEFAULTS[version]


@pytest.mark.parametrize("version", [version for version in gemm.VERSIONS if version not in tiles.CANDIDATES])
def test_a_version_without_a_choice_has_no_tile(table, version):
    table("{")
    assert tiles.choose(OnGpu(), version, "d_w", *LAYER) is None


def test_a_trial_goes_before_the_table_and_ends(table):
    table({"runs": [run()]})
    for executor in (OnGpu(), SimtExecutor()):
        with tiles.trying(tiles.MmaTile(band=3)):
            assert tiles.choose(executor, "3_mma", "d_w", *LAYER) == tiles.MmaTile(band=3)
            assert tiles.choose(executor, "2_tiled", "d_w", *LAYER) is None
    assert tiles.choose(OnGpu(), "3_mma", "d_w", *LAYER) == WIDE


def test_the_presets_that_are_timed_are_of_every_class():
    classes = set()
    for name, tokens in tune.SHAPES:
        config = preset(name).config.replace(**({} if tokens is None else {"L": tokens}))
        classes.add(tiles.shape_class(config.R, config.E, config.d, config.h))
    assert classes == {(groups, weights) for groups in tiles.GROUPS for weights in tiles.WEIGHTS}
    assert tiles.shape_class(0, 4, 8, 16) == ("short", "small"), "an empty layer has a class"


@pytest.mark.parametrize("tile", [tile for version in ("3_mma", "3_mma_tf32") for tile in tiles.CANDIDATES[version]])
def test_every_candidate_fits_into_the_shared_memory_of_every_gpu(tile):
    terms = 4 * tile.rows * (tile.columns // tile.warp_columns)
    assert tile.shared_bytes + terms + 16 <= 99 * 1024 and 32 <= tile.threads <= 1024


def test_candidates_differ():
    for candidates in tiles.CANDIDATES.values():
        assert len(set(candidates)) == len(candidates) >= 2


# ---- the table -----------------------------------------------------------------------------------


def test_the_committed_table_can_be_read_and_is_small():
    runs = tiles.load(tiles.TABLE)
    assert tiles.TABLE.stat().st_size < 32_000
    for of_gpu in runs:
        assert all(entry["gain"] >= tune.LEAST_GAIN for entry in of_gpu["entries"])
        keys = Counter(tuple(entry[name] for name in tiles.KEY) for entry in of_gpu["entries"])
        assert not keys or max(keys.values()) == 1


def with_entries(entries):
    return {"runs": [run(entries=entries)]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tiles.json is not JSON: Expecting property name"),
        ([], "tiles.json is not a JSON object, but it must have runs"),
        ({"runs": 3}, "tiles.json: runs is not a list"),
        (
            {"device": "a GPU", "runs": [], "rows": []},
            "tiles.json has device, rows beside its runs, so it is not a table of tiles",
        ),
        (with_entries(3), r"tiles.json: runs\[0\].entries is not a list"),
        (
            {"runs": [{"device": "a GPU"}]},
            r"tiles.json: runs\[0\] has no capability, clocks, commit, entries, versions",
        ),
        ({"runs": [run("nine")]}, r"tiles.json: runs\[0\] has the capability 'nine', but it must be as '9.0'"),
        (with_entries([7]), r"tiles.json: runs\[0\].entries\[0\] is not a JSON object, but it must have gain, groups"),
        (with_entries([entry(version="3_mm")]), r"unknown version of .*entries\[0\] '3_mm'. Did you mean '3_mma'"),
        (with_entries([entry(kernel="d_w1")]), r"unknown kernel of .*entries\[0\] 'd_w1'. Did you mean 'd_w'"),
        (with_entries([entry(groups="big")]), r"unknown groups of .*entries\[0\] 'big'"),
        (
            with_entries([entry(tile=tile_as_json(WIDE) | {"rows": 96})]),
            r"the tile of tiles.json: runs\[0\].entries\[0\] is .*'rows': 96.*, which is no candidate of 3_mma",
        ),
    ],
)
def test_a_broken_table_says_where_it_is_broken(table, content, message):
    path = table(content)
    with pytest.raises(ValueError, match=message):
        tiles.load(path)
    with pytest.raises(ValueError, match=message):
        tiles.choose(OnGpu(), "3_mma", "d_w", *LAYER)
    with pytest.raises(ValueError, match=message):
        tune.check_place(path)


def time(tile, ms, preset="one", **changes):
    key = {"version": "3_mma", "kernel": "d_w", "groups": "long", "weights": "small"} | changes
    return tune.Time(preset, **key, tile=tile, ms=ms)


def test_the_tile_with_the_largest_gain_over_all_layers_of_a_class_is_taken():
    default, second, third, *_ = tiles.CANDIDATES["3_mma"]
    times = [time(default, 4.0), time(second, 2.0), time(third, 3.0)]
    times += [time(default, 8.0, "two"), time(second, 16.0, "two"), time(third, 4.0, "two")]
    times += [time(default, 1.0, kernel="d_w3"), time(second, 0.99, kernel="d_w3")]
    (found,) = tune.entries(times)
    assert found == entry(tile=vars(third), gain=round((4 / 3 * 2) ** 0.5, 3))


def test_a_run_goes_in_the_place_of_that_of_the_same_class_of_gpu(tmp_path):
    path = tmp_path / "new" / "tiles.json"
    for capability, gain in (("9.0", 1.1), ("8.0", 1.2), ("9.0", 1.3)):
        tune.check_place(path)
        tune.add(path, run(capability, [entry(gain=gain)]))
    assert [(of_gpu["capability"], of_gpu["entries"][0]["gain"]) for of_gpu in tiles.load(path)] == [
        ("8.0", 1.2),
        ("9.0", 1.3),
    ]


# ---- timing ----------------------------------------------------------------------------------------


class Uneven(PretendedDevice):
    """The more columns or the larger the band, the slower."""

    def captured(self, work):
        tile = tiles._trial.get()
        work()
        cost = getattr(tile, "columns", 0) + tile.band

        def replay():
            self.now += cost

        return replay


@pytest.mark.parametrize(
    ("version", "kernel"), [("3_mma", "d_w"), ("3_mma_tf32", "d_x_rows"), ("7_persistent", "expert_down")]
)
def test_every_candidate_is_compiled_and_timed(version, kernel):
    config = TINY.replace(dtype=gemm.VERSIONS[version][-1])
    times = tune.time_tiles("tiny", config, version, kernel, 2, Uneven())
    assert [time.tile for time in times] == list(tiles.CANDIDATES[version])
    assert [time.ms for time in times] == [getattr(time.tile, "columns", 0) + time.tile.band for time in times]
    assert {(time.version, time.kernel, time.groups, time.weights) for time in times} == {
        (version, kernel, "short", "small")
    }
    least = min(times, key=lambda time: time.ms)
    assert [found["tile"] for found in tune.entries(times)] == [vars(least.tile)] * (least.tile != times[0].tile)


def test_a_layer_is_timed_in_a_dtype_that_the_version_computes_in():
    assert tune._in_dtype_of("3_mma", TINY) is TINY
    assert tune._in_dtype_of("3_mma_tf32", TINY) == replace(TINY, dtype="float32")


def test_jobs_are_of_every_layer_version_and_kernel():
    jobs = tune.jobs((), None, (), 5)
    assert len(jobs) == len(tune.SHAPES) * len(tiles.CANDIDATES) * len(tiles.KERNELS)
    jobs = tune.jobs(("conf1",), 64, ("3_mma",), 5)
    assert [(job.args[0], job.args[1].L, job.args[3]) for job in jobs] == [
        ("conf1, L=64", 64, kernel) for kernel in tiles.KERNELS
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--kernel", "2_tiled"),
            "unknown version with a choice of tiles '2_tiled'. Valid: 3_mma, 3_mma_tf32, 7_persistent",
        ),
        (("--preset", "conf9"), "unknown preset 'conf9'. Did you mean 'conf7'?"),
        (("--repetitions", "0"), "repetitions is 0, but it must be >= 1"),
        (("--tokens", "0"), "L is 0, but it must be >= 1"),
        ((), "only a GPU is timed"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in result.output


def test_the_command_shows_times_and_writes_the_table(monkeypatch, tmp_path):
    device = Uneven()
    monkeypatch.setattr("moeblaze_ref.bench.plan.gpu", lambda: device)
    monkeypatch.setattr(tune, "SHAPES", (("conf1", 8),))
    monkeypatch.setattr(tiles, "KERNELS", ("expert_down",))
    monkeypatch.setitem(tiles.CANDIDATES, "3_mma", (tiles.MmaTile(), tiles.MmaTile(band=3)))
    path = tmp_path / "tiles.json"
    result = CliRunner().invoke(app, ["tune", "--kernel", "3_mma", "--record", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "conf1, L=8" in result.output and "128 x 128 x 32, 4 stages, 128 threads, band 3" in result.output
    (written,) = tiles.load(path)
    assert [found["tile"] for found in written["entries"]] == [tiles.MmaTile(band=3)]
    path.write_text("{")
    result = CliRunner().invoke(app, ["tune", "--kernel", "3_mma", "--record", str(path)])
    assert result.exit_code == 2 and "tiles.json is not JSON" in result.output
