"""sparseattn.data.gestures: the sensor's law, simulated streams, official layouts, windows, samples, votes.

Statistical tests have fixed seeds; each would reject correct code once in 10^4 seeds.
"""

import dataclasses
import struct
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from sparseattn.data import gestures as G
from sparseattn.data.cache import load_arrays

ALARM = 1e-4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def same(a, b):
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(G.Stream))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARSEATTN_DATA", raising=False)


@pytest.fixture(scope="module")
def streams():
    rng = np.random.default_rng(0)
    return tuple(G.simulate_stream(G.draw_subject(n), g, 1.0, rng) for n in (1, 2) for g in (0, 5, 10))


def made_up(times, duration, label=0, user="user001"):
    """A stream with events at these times, in places that tell them apart."""
    t = np.asarray(times, np.int32)
    return G.Stream((np.arange(len(t)) % 128).astype(np.uint8), (np.arange(len(t)) // 128 % 128).astype(np.uint8), t,
                    np.arange(len(t)) % 2 == 1, duration, label, user)


# The law of a pixel

@pytest.mark.parametrize("refractory", [0.0, 0.2, 1.0, 3.7])
@pytest.mark.parametrize("step", [1.0, 5000.0])
def test_fast_events_equal_the_slow_ones(refractory, step):
    rng = np.random.default_rng(3)
    levels = np.cumsum(rng.normal(0, 0.3, (80, 30)) * (rng.random((80, 30)) < 0.6), 0)
    threshold = rng.uniform(0.05, 0.5, 30)
    blocks = np.split(levels, [1, 2, 40])
    t, pixel, up = G.threshold_events(blocks, step, threshold, refractory=refractory * step)
    assert (np.diff(t) >= 0).all()
    for i in range(30):
        slow = G.threshold_events_reference(levels[:, i], step, threshold[i], refractory * step)
        assert np.allclose(t[pixel == i], [time for time, _ in slow], rtol=0, atol=1e-8 * step)
        assert up[pixel == i].tolist() == [sign for _, sign in slow]
        assert (np.diff(t[pixel == i]) >= refractory * step - 1e-9 * step).all()


@pytest.mark.parametrize("height", [0.05, 0.35, 1.0, -0.75])
def test_count_is_contrast_over_threshold(height):
    t, _, up = G.threshold_events([np.array([[0.0], [height / 3], [height]])], 1.0, 0.1001)
    assert len(t) == int(abs(height) / 0.1001) and (up == (height > 0)).all()


def test_ramp_with_reset():
    for refractory in (0.5, 2.0):
        climb = 10 * 0.2 / 1.7
        t, _, _ = G.threshold_events([np.array([[0.0], [1.7]])], 10.0, 0.2, refractory=refractory)
        assert len(t) == 1 + int((10 - climb) / (climb + refractory))
        assert np.allclose(np.diff(t), climb + refractory)


def test_light_level_and_sign():
    rng = np.random.default_rng(1)
    intensity = rng.uniform(0.1, 1, (40, 25))
    t, pixel, up = G.threshold_events([np.log(intensity)], 1.0, 0.3, refractory=0.1)
    bright = G.threshold_events([np.log(100 * intensity)], 1.0, 0.3, refractory=0.1)
    negative = G.threshold_events([-np.log(intensity)], 1.0, 0.3, refractory=0.1)
    assert len(t) > 500 and np.array_equal(bright[1], pixel) and np.allclose(bright[0], t, atol=1e-9)
    assert np.array_equal(negative[1], pixel) and np.allclose(negative[0], t) and np.array_equal(negative[2], ~up)


def test_pixels_do_not_mix_and_what_comes_back_balances():
    rng = np.random.default_rng(2)
    film = np.cumsum(rng.normal(0, 0.5, (50, 8)), 0)
    film[-1] = film[0]
    t, pixel, up = G.threshold_events([film], 1.0, 0.4)
    assert (np.abs(np.bincount(pixel, np.where(up, 1, -1), 8)) <= 1).all()
    alone = G.threshold_events([film[:, 3:4]], 1.0, 0.4)
    assert np.array_equal(alone[0], t[pixel == 3]) and np.array_equal(alone[2], up[pixel == 3])


def test_single_precision_finds_nearly_the_same():
    rng = np.random.default_rng(5)
    film = np.cumsum(rng.normal(0, 0.2, (100, 200)), 0)
    exact, rough = (G.threshold_events([film.astype(kind)], 1.0, 0.2, refractory=0.1) for kind in (float, np.float32))
    assert abs(len(exact[0]) - len(rough[0])) <= 2


@pytest.mark.parametrize("blocks, step, threshold, refractory", [
    ([], 1.0, 0.2, 0.0), ([np.zeros((0, 3))], 1.0, 0.2, 0.0), ([np.zeros((2, 3))], 0.0, 0.2, 0.0),
    ([np.zeros((2, 3))], 1.0, np.array([0.1, 0.0, 0.1]), 0.0), ([np.zeros((2, 3))], 1.0, 0.2, -1.0)])
def test_events_refuse(blocks, step, threshold, refractory):
    with pytest.raises(ValueError, match="blocks|step"):
        G.threshold_events(blocks, step, threshold, refractory=refractory)


# The camera

def test_noise_is_poisson():
    sensor = G.Sensor(noise=0.5)
    draws = [sensor.noise_events(0.2, np.random.default_rng(k), light=2.0) for k in range(200)]
    counts, mean = np.array([len(t) for t, _, _ in draws]), 0.5 * 2 * 0.2 * 128**2
    assert abs(counts.mean() - mean) < stats.norm.isf(ALARM / 2) * (mean / 200) ** 0.5
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], 199) / 199
    assert low < counts.var(ddof=1) / mean < high
    t, pixel, up = (np.concatenate(part) for part in zip(*draws, strict=True))
    assert stats.kstest(t / 2e5, "uniform").pvalue > ALARM
    assert stats.chisquare(np.bincount(pixel, minlength=128**2)).pvalue > ALARM
    assert stats.binomtest(int(up.sum()), len(up)).pvalue > ALARM


def test_thresholds_belong_to_the_camera():
    one = G.Sensor(mismatch=0.5)
    assert np.array_equal(one.thresholds(), G.Sensor(mismatch=0.5).thresholds())
    assert not np.array_equal(one.thresholds(), G.Sensor(mismatch=0.5, seed=1).thresholds())
    assert one.thresholds().min() == 0.25 * one.threshold and (G.Sensor(mismatch=0).thresholds() == 0.2).all()


@pytest.mark.parametrize("wrong", [{"threshold": 0.0}, {"mismatch": -1.0}, {"refractory": -1.0}, {"step": 0.0},
                                   {"noise": float("nan")}, {"noise": float("inf")}])
def test_sensor_refuses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        G.Sensor(**wrong)


# People and movements

@pytest.mark.parametrize("gesture", range(11))
def test_paths_have_their_period_and_reach(gesture):
    phase = np.linspace(0, 20 * np.pi, 400)
    paths = G.hand_paths(gesture, phase, 1.3, np.random.default_rng(0))
    again = G.hand_paths(gesture, phase + 20 * np.pi, 1.3, np.random.default_rng(0))
    assert paths.shape == (400, 2, 2) and np.allclose(paths, again)         # ten cycles hold every frequency
    shoulder, elbow, wrist = G._arms(paths)
    limbs = np.linalg.norm(np.stack([elbow - shoulder, wrist - elbow]), axis=-1)
    assert limbs.max() <= G._ARM + 1e-9 and np.isfinite(limbs).all()


def test_circles_turn_as_named():
    phase = np.linspace(0, 2 * np.pi, 100)
    for gesture, arm, turn in ((3, 0, 1), (4, 0, -1), (5, 1, 1), (6, 1, -1)):
        x, y = (G.hand_paths(gesture, phase)[:, arm] - G.hand_paths(gesture, phase)[:-1, arm].mean(0)).T
        area = 0.5 * (x[:-1] * y[1:] - x[1:] * y[:-1]).sum()                # rows grow downwards: positive is clockwise
        assert np.sign(area) == turn and abs(area) > 1000
        still = G.hand_paths(gesture, phase)[:, 1 - arm]
        assert np.ptp(still, axis=0).max() == 0


def test_left_mirrors_right():
    phase = np.linspace(0, 6, 50)
    for right, left, shift in ((1, 2, 0), (3, 6, np.pi), (4, 5, np.pi)):
        assert np.allclose(G.hand_paths(right, phase), G.hand_paths(left, phase + shift)[:, ::-1] * [-1, 1])


def test_paths_refuse():
    for gesture, rng in ((11, np.random.default_rng(0)), (-1, None), (10, None)):
        with pytest.raises(ValueError, match="gesture|rng"):
            G.hand_paths(gesture, np.zeros(3), 1.0, rng)


def test_paint_covers_the_area_of_a_capsule():
    frames, end = 5, np.float32([90.3, 70.7])
    begin = np.linspace([30.2, 40.1], [60.9, 20.4], frames).astype(np.float32)
    part = G._Capsule(begin, np.repeat(end[None], frames, 0), np.float32(6), np.float32(1))
    image = np.zeros((frames, 128, 128), np.float32)
    flat = dataclasses.replace(part, grey=np.float32(1))
    G._paint(image, flat, slice(0, frames), np.zeros(2, np.float32))
    row, column = np.mgrid[:128, :128]
    for k in range(frames):
        line = end - begin[k]
        along = np.clip(((column - begin[k, 0]) * line[0] + (row - begin[k, 1]) * line[1]) / (line**2).sum(), 0, 1)
        away = np.hypot(column - begin[k, 0] - along * line[0], row - begin[k, 1] - along * line[1])
        expected = np.clip(6.5 - away, 0, 1) * (1 - 0.4 * (away / 6) ** 2)
        assert np.allclose(image[k], expected, atol=1e-3)
        assert abs(np.clip(6.5 - away, 0, 1).sum() / (np.pi * 36 + 12 * np.linalg.norm(line)) - 1) < 0.01


def test_paint_stays_inside_the_picture():
    for place in ([-50, 5], [200, 200], [0, 0], [127, 3]):
        begin = np.float32([place, place])
        part = G._Capsule(begin, begin, np.float32(5), np.float32(1))
        image = np.zeros((2, 20, 30), np.float32)
        G._paint(image, part, slice(0, 2), np.zeros(2, np.float32))
        assert image.max() == (0 if place[0] in (-50, 200, 127) else 1)


# Streams

def test_streams_are_well_formed(streams):
    for stream in streams:
        assert (stream.x.dtype, stream.y.dtype, stream.t.dtype) == (np.uint8, np.uint8, np.int32)
        assert (np.diff(stream.t) >= 0).all() and 0 <= stream.t[0] and stream.t[-1] < stream.duration == 1_000_000
        assert max(stream.x.max(), stream.y.max()) < 128 and 0.3 < stream.polarity.mean() < 0.7
        assert len(stream) > 2000


def test_streams_depend_on_their_draw_alone(streams):
    rng = np.random.default_rng(0)
    assert same(G.simulate_stream(G.draw_subject(1), 0, 1.0, rng), streams[0])
    assert not np.array_equal(streams[0].t, streams[3].t)


def test_blocks_of_frames_change_nothing():
    person, rng = G.draw_subject(4), np.random.default_rng(0)
    parts = G._figure(person, *G._motion(person, 8, np.arange(50) * 0.005, rng))
    box = G._box(parts)
    one, many = (np.concatenate(list(G._film(parts, person.wall, box, 50, block))) for block in (50, 7))
    assert np.allclose(one, many, atol=1e-5)
    whole = np.concatenate(list(G._film(parts, person.wall, np.array([[0, 0], [128, 128]]), 50)))
    (x0, y0), (x1, y1) = box
    outside = np.ones((128, 128), bool)
    outside[y0:y1, x0:x1] = False
    assert np.ptp(whole.reshape(50, 128, 128)[:, outside], axis=0).max() == 0          # nothing moves outside the box
    assert np.allclose(whole.reshape(50, 128, 128)[:, y0:y1, x0:x1].reshape(50, -1), one, atol=1e-5)


def test_refractory_period_between_events_of_a_pixel():
    stream = G.simulate_stream(G.draw_subject(1), 8, 0.5, np.random.default_rng(0), G.Sensor(noise=0, refractory=3000))
    place = stream.y.astype(int) * 128 + stream.x
    order = np.lexsort((stream.t, place))
    gap = np.diff(stream.t[order].astype(int))[np.diff(place[order]) == 0]
    assert len(gap) > 100 and gap.min() >= 2999                             # whole microseconds


def test_a_figure_at_rest_is_silent(monkeypatch):
    still = np.tile(np.array([[[-20.0, 40], [20, 40]]]), (41, 1, 1))
    monkeypatch.setattr(G, "_motion", lambda *_: (still, np.zeros((41, 2))))
    stream = G.simulate_stream(G.draw_subject(1), 0, 0.2, np.random.default_rng(0), G.Sensor(noise=0))
    assert len(stream) == 0 and stream.duration == 200_000


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e4])
def test_stream_length_is_checked(seconds):
    with pytest.raises(ValueError, match="seconds"):
        G.simulate_stream(G.draw_subject(1), 0, seconds, np.random.default_rng(0))


def test_events_outside_the_picture_are_refused():
    with pytest.raises(ValueError, match="events"):
        G._stream([0, 128], [0, 0], [1, 2], [0, 1], 10, 0, "a")
    assert len(G._stream([0, 100], [0, 0], [1, 20], [0, 1], 10, 0, "a")) == 1          # outside of its time: left out


# Sets

def test_save_and_load(tmp_path, streams, monkeypatch):
    gestures = G.Gestures("six streams", (*streams, made_up([], 5), made_up([0, 2**20, 2**21], 2**22, 10, "x")))
    G.save_gestures(tmp_path / "data" / "gestures" / "train.npz", gestures)
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path / "data"))
    assert G.gesture_sources() == ["compact", "simulated"] and G.gesture_sources("test") == ["simulated"]
    again = G.load_gestures()
    assert again.source == "six streams"
    assert all(same(a, b) for a, b in zip(gestures.streams, again.streams, strict=True))
    assert G.load_gestures(users=1).users == ("user001",)
    assert len(G._unpack(G._pack(G.Gestures("none", ())))) == 0


def test_people_split_and_cache(tmp_path):
    options = {"seconds": 0.2, "progress": False, "cache": tmp_path / "own"}
    train, test = G.simulate_gestures("train", users=2, **options), G.simulate_gestures("test", users=1, **options)
    assert train.users == ("user001", "user002") and test.users == ("user095",)
    assert train.labels.tolist() == [*range(11)] * 2 and len(train.named()) == 20
    assert len(list((tmp_path / "own" / "gestures").glob("*.npz"))) == 3
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "own" / "gestures").glob("*.npz")}
    again = G.load_gestures("train", users=1, **options)
    assert all(same(a, b) for a, b in zip(again.streams, train.streams[:11], strict=True))
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "own" / "gestures").glob("*.npz")}
    assert "no recordings" in train.source and "2 made-up people" in train.source
    other = G.simulate_gestures("train", users=1, seed=1, **options)
    assert not np.array_equal(other.streams[0].t, train.streams[0].t)
    assert (len(G._PEOPLE["train"]), len(G._PEOPLE["test"])) == (94, 24)
    assert not set(G._PEOPLE["train"]) & set(G._PEOPLE["test"])


@pytest.mark.parametrize("options", [{"split": "val"}, {"users": 95}, {"users": 0}, {"workers": 0}, {"source": "moon"},
                                     {"users": True}])
def test_load_refuses(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        G.load_gestures(**options)


def test_missing_source(tmp_path):
    with pytest.raises(FileNotFoundError, match="DvsGesture"):
        G.load_gestures(source="official", root=tmp_path)


# Official layouts

HEADER = (b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n#Start-Time: 2016-10-11 15:36:21 (TZ-0700)\r\n"
          b"#!END-HEADER\r\n")


def packet(events, kind=1, overflow=0, valid=None, size=8):
    body = b"".join(struct.pack("<II", x << 17 | y << 2 | p << 1 | ok, t) for x, y, t, p, ok in events)
    count = len(events)
    return struct.pack("<hhiiiiii", kind, 1, size, 4, overflow, count, count, count if valid is None else valid) + body


def random_events(count, rng, start=0):
    t = start + np.sort(rng.integers(0, 10**6, count))
    return list(zip(rng.integers(0, 128, count).tolist(), rng.integers(0, 128, count).tolist(), t.tolist(),
                    rng.integers(0, 2, count).tolist(), [1] * count, strict=True))


def write_trial(folder, name, events, labels):
    packets = b"".join(packet(events[k:k + 50]) for k in range(0, len(events), 50))
    (folder / f"{name}.aedat").write_bytes(HEADER + packets)
    rows = "".join(f"{label},{begin},{end}\n" for label, begin, end in labels)
    (folder / f"{name}_labels.csv").write_text("class,startTime_usec,endTime_usec\n" + rows)


def test_aedat_round_trip(tmp_path):
    events = random_events(333, np.random.default_rng(0))
    write_trial(tmp_path, "user01_lab", events, [(1, 0, 10)])
    read = G._read_aedat(tmp_path / "user01_lab.aedat")
    for name, k in (("x", 0), ("y", 1), ("t", 2), ("polarity", 3)):
        assert read[name].tolist() == [e[k] for e in events]


def test_aedat_overflow_validity_and_other_packets(tmp_path):
    one, two = [(1, 2, 2**31 - 1, 1, 1), (3, 4, 2**31 - 1, 0, 0)], [(5, 6, 7, 1, 0), (7, 8, 9, 0, 0)]
    path = tmp_path / "a.aedat"
    path.write_bytes(HEADER + packet(one, valid=1) + packet([(9, 9, 9, 1, 1)], kind=2) + packet(two, overflow=1)
                     + packet([], kind=1))
    read = G._read_aedat(path)
    assert read["x"].tolist() == [1, 5, 7] and read["t"].tolist() == [2**31 - 1, 2**31 + 7, 2**31 + 9]
    assert (np.diff(read["t"]) > 0).all()
    path.write_bytes(HEADER)
    assert len(G._read_aedat(path)["t"]) == 0


def test_aedat_first_byte_of_events_may_be_a_hash(tmp_path):
    path = tmp_path / "a.aedat"
    path.write_bytes(HEADER + packet([(1, 2, 3, 1, 1)], kind=35) + packet([(1, 2, 3, 1, 1)]))       # 35 is "#"
    assert G._read_aedat(path)["t"].tolist() == [3]


def test_aedat_cut_short_warns(tmp_path):
    path = tmp_path / "a.aedat"
    path.write_bytes((HEADER + packet([(1, 2, 3, 1, 1)]) + packet([(1, 2, 4, 1, 1)] * 3))[:-5])
    with pytest.warns(UserWarning, match="within a packet"):
        assert G._read_aedat(path)["t"].tolist() == [3]


@pytest.mark.parametrize("data", [b"", b"#!AER-DAT2.0\r\n", b"PK\x03\x04", HEADER + packet([(1, 2, 3, 1, 1)], size=12),
                                  HEADER + struct.pack("<hhiiiiii", 1, 1, 8, 4, 0, -5, -5, 0),
                                  HEADER + struct.pack("<hhiiiiii", 1, 1, 8, 4, 0, 1, 3, 3) + bytes(24),
                                  HEADER + struct.pack("<hhiiiiii", 1, 1, 0, 4, 0, 9, 9, 9)])
def test_aedat_refuses(tmp_path, data):
    path = tmp_path / "a.aedat"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="a.aedat"):
        G._read_aedat(path)


def test_official_folder(tmp_path, monkeypatch):
    folder, rng = tmp_path / "DvsGesture", np.random.default_rng(1)
    folder.mkdir()
    labels = [(1, 1000, 400_000), (8, 500_000, 900_000), (11, 900_000, 999_000)]
    for name in ("user01_led", "user02_lab"):
        write_trial(folder, name, random_events(2000, rng), labels)
    (folder / "trials_to_train.txt").write_text("user01_led.aedat\nuser02_lab.aedat\n\n")
    (folder / "trials_to_test.txt").write_text("user02_lab.aedat\n")
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    gestures = G.load_gestures("train", progress=False)
    assert gestures.labels.tolist() == [0, 7, 10] * 2 and gestures.users == ("user01_led", "user02_lab")
    assert "official" in gestures.source and len(G.load_gestures("test", progress=False)) == 3
    assert len(G.load_gestures("train", users=1, progress=False)) == 3
    first = gestures.streams[1]
    read = G._read_aedat(folder / "user01_led.aedat")
    rows = (read["t"] >= 500_000) & (read["t"] < 900_000)
    assert first.duration == 400_000 and np.array_equal(first.t, read["t"][rows] - 500_000)
    assert np.array_equal(first.x, read["x"][rows]) and np.array_equal(first.polarity, read["polarity"][rows])


@pytest.mark.parametrize("labels", ["", "1,2\n", "1,5,4\n", "12,0,9\n", "0,0,9\n", "a,0,9\n", "1,2\n1,2\n1,2\n",
                                    "1,0,99999999999999999999\n"])
def test_label_tables_are_checked(tmp_path, labels):
    write_trial(tmp_path, "user01_led", random_events(10, np.random.default_rng(0)), [])
    (tmp_path / "user01_led_labels.csv").write_text("class,startTime_usec,endTime_usec\n" + labels)
    (tmp_path / "trials_to_train.txt").write_text("user01_led.aedat")
    with pytest.raises(ValueError, match="user01_led_labels.csv"):
        G.load_official(tmp_path, progress=False)


@pytest.mark.parametrize("names", ["", "../secret.aedat", "/etc/passwd", "user01.txt"])
def test_trial_lists_are_checked(tmp_path, names):
    (tmp_path / "trials_to_train.txt").write_text(names)
    with pytest.raises(ValueError, match="trials_to_train"):
        G.load_official(tmp_path, progress=False)


@pytest.mark.parametrize("structured", [False, True])
def test_tonic_layout(tmp_path, monkeypatch, streams, structured):
    folder = tmp_path / "DVSGesture" / "ibmGestureTest"
    for user, chosen in (("user24_led", streams[:2]), ("user25_lab", streams[2:3])):
        (folder / user).mkdir(parents=True)
        for s in chosen:
            if structured:
                table = np.zeros(len(s), [("x", "<i2"), ("y", "<i2"), ("p", "?"), ("t", "<i8")])
                table["x"], table["y"], table["p"], table["t"] = s.x, s.y, s.polarity, s.t + 777
            else:
                table = np.stack([s.x, s.y, s.polarity, (s.t + 777) / 1000], 1)
            np.save(folder / user / f"{s.label}.npy", table)
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    gestures = G.load_gestures("test", progress=False)
    assert gestures.users == ("user24_led", "user25_lab") and gestures.labels.tolist() == [0, 5, 10]
    for got, s in zip(gestures.streams, streams, strict=False):
        assert np.array_equal(got.t, s.t - s.t[0]) and got.duration == s.t[-1] - s.t[0] + 1
        assert all(np.array_equal(getattr(got, n), getattr(s, n)) for n in ("x", "y", "polarity"))


def test_spikingjelly_layout(tmp_path, monkeypatch, streams):
    folder = tmp_path / "DVS128Gesture" / "events_np" / "train"
    for user in ("user01_led", "user02_fluorescent_led"):
        for s in streams[:2]:
            (folder / str(s.label)).mkdir(parents=True, exist_ok=True)
            np.savez_compressed(folder / str(s.label) / f"{user}_0.npz", x=s.x, y=s.y, t=s.t, p=s.polarity)
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    gestures = G.load_gestures("train", users=1, progress=False)
    assert gestures.users == ("user01_led",) and gestures.labels.tolist() == [0, 5]
    assert len(G.load_gestures("train", progress=False)) == 4
    assert np.array_equal(gestures.streams[0].x, streams[0].x)


@pytest.mark.parametrize("name, content", [
    ("u/0.npy", np.array([{"a": 1}], object)), ("u/0.npy", np.zeros((3, 5))), ("u/11.npy", np.zeros((3, 4))),
    ("u/a.npy", np.zeros((3, 4))), ("u/0.npy", np.full((2, 4), 200.0)), ("u/0.npy", np.full((2, 4), -1.0)),
    ("u/0.txt", None)])
def test_array_files_are_checked(tmp_path, name, content):
    path = tmp_path / name
    path.parent.mkdir()
    if content is None:
        path.write_text("events")
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(ValueError, match=r"npy|events"):
        G.load_folder(tmp_path, progress=False)


def test_no_file_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return warnings.warn, ("unpickled",)

    (tmp_path / "0").mkdir()
    np.savez(tmp_path / "0" / "user01_0.npz", x=np.array([Bomb()], object), y=np.zeros(1), t=np.zeros(1), p=np.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="user01_0.npz"):
            G.load_folder(tmp_path, progress=False)


# Windows

@pytest.mark.parametrize("window, step", [(750, 100), (500, 250), (100, 33.5)])
def test_windows_follow_the_formula(window, step):
    for duration in np.random.default_rng(0).integers(0, 3_000_000, 50).tolist():
        starts = G.window_starts(duration, window, step)
        assert len(starts) == max(int((duration / 1000 - window) // step) + 1, 0)
        if len(starts):
            assert starts[-1] + 1000 * window <= duration < starts[-1] + 1000 * (window + step)
            assert starts[0] == 0 and np.allclose(np.diff(starts), 1000 * step)


def test_windows_refuse():
    for window, step in ((0, 100), (750, 0), (750, -1)):
        with pytest.raises(ValueError, match="window, step"):
            G.window_starts(10**6, window, step)


def test_clips_hold_the_events_of_their_window(streams):
    clips = G.cut_clips(G.Gestures("six", streams), window=300, step=150)
    assert len(clips) == len(streams) * 5 and clips.source == "six"
    for number, start, first, last in zip(clips.stream, clips.start, clips.first, clips.last, strict=True):
        t = streams[number].t
        assert np.array_equal(np.flatnonzero((t >= int(start)) & (t < int(start) + 300_000)), np.arange(first, last))
    assert clips.labels.tolist() == [s.label for s in streams for _ in range(5)]
    assert clips.subset([3, 0]).start.tolist() == [450_000, 0]
    late = clips.start >= 450_000
    assert torch.equal(clips.subset(late).start, clips.start[late])
    assert clips.gestures.subset(clips.gestures.labels == 5).labels.tolist() == [5, 5]


def test_empty_windows_are_left_out():
    gestures = G.Gestures("sparse", (made_up([0, 1_500_000], 2_000_000), made_up([], 10**6), made_up([5], 700_000)))
    clips = G.cut_clips(gestures)
    assert clips.start.tolist() == [0, *range(800_000, 1_300_000, 100_000)] and set(clips.stream.tolist()) == {0}
    assert len(G.cut_clips(G.Gestures("none", ()))) == 0
    assert list(G.batches(G.cut_clips(G.Gestures("none", ())), 4, shuffle=False)) == []


# Points

def test_points_are_events(streams):
    clips = G.cut_clips(G.Gestures("six", streams))
    points = G.sample_points(clips, [4], 500)[0].double()
    stream, start = streams[int(clips.stream[4])], int(clips.start[4])
    x, y = ((points[:, k] + 1) * 63.5 for k in (0, 1))
    t = (points[:, 2] + 1) * 375_000 + start
    have = set(zip(stream.x.tolist(), stream.y.tolist(), stream.t.tolist(), stream.polarity.tolist(), strict=True))
    for a, b, d, p in torch.stack([x, y, t, points[:, 3]], -1).round().int().tolist():
        assert any((a, b, d + shift, p == 1) in have for shift in (-1, 0, 1))
    assert points[:, :3].abs().max() <= 1 and len(torch.unique(points, dim=0)) >= 499


def test_fixed_draw_is_nested_and_local(streams):
    clips = G.cut_clips(G.Gestures("six", streams))
    many = G.sample_points(clips, range(len(clips)), 300)
    assert torch.equal(many[:, :50], G.sample_points(clips, range(len(clips)), 50))
    assert torch.equal(many[[7, 2]], G.sample_points(clips, torch.tensor([7, 2]), 300))
    assert not torch.equal(many, G.sample_points(clips, range(len(clips)), 300, seed=1))


def test_few_events_are_repeated_evenly():
    clips = G.cut_clips(G.Gestures("few", (made_up([10, 20, 30], 750_000),)))
    points = G.sample_points(clips, [0], 8)[0]
    values, counts = torch.unique(points, dim=0, return_counts=True)
    assert len(values) == 3 and sorted(counts.tolist()) == [2, 3, 3]
    random = G.sample_points(clips, [0], 8, generator=seeded())[0]
    assert sorted(torch.unique(random, dim=0, return_counts=True)[1].tolist()) == [2, 3, 3]


def test_random_draw_is_uniform():
    clips = G.cut_clips(G.Gestures("one", (made_up(np.arange(40), 750_000),)))
    g = seeded(1)
    x = torch.cat([G.sample_points(clips, [0], 8, generator=g)[0, :, 0] for _ in range(1500)])
    assert stats.chisquare(torch.unique(x, return_counts=True)[1].numpy()).pvalue > ALARM


def test_batches(streams):
    clips = G.cut_clips(G.Gestures("six", streams))
    seen = list(G.batches(clips, 4, points=32, generator=seeded()))
    again = list(G.batches(clips, 4, points=32, generator=seeded()))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(seen, again, strict=True) for k in a)
    assert sum(len(b["labels"]) for b in seen) == len(clips) == 18
    assert seen[0]["points"].shape == (4, 32, 3) and seen[0]["features"].shape == (4, 32, 1)
    assert sorted(torch.cat([b["stream"] for b in seen]).tolist()) == sorted(clips.stream.tolist())
    plain = list(G.batches(clips, 5, points=32, shuffle=False, drop_last=True))
    assert len(plain) == 3 and torch.equal(plain[0]["points"], G.sample_points(clips, range(5), 32)[..., :3])
    for wrong in ({"batch_size": 0, "shuffle": False}, {"batch_size": 2}):
        with pytest.raises(ValueError, match="batch_size|generator"):
            next(G.batches(clips, **wrong))
    with pytest.raises(ValueError, match="points"):
        G.sample_points(clips, [0], 0)


# Votes

def test_vote_is_the_mode():
    rng = np.random.default_rng(0)
    predictions, stream = rng.integers(0, 5, 400), rng.integers(0, 30, 400)
    votes = G.vote(torch.from_numpy(predictions), torch.from_numpy(stream), 32)
    for k in range(30):
        assert votes[k] == stats.mode(predictions[stream == k]).mode        # SciPy too takes the smallest of equals
    assert votes[30:].tolist() == [-1, -1]
    assert G.vote(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), 2).tolist() == [-1, -1]


@pytest.mark.parametrize("predictions, stream, streams",
                         [([1, 2], [0], None), ([1], [3], 3), ([-1], [0], None), ([1], [-1], None)])
def test_vote_refuses(predictions, stream, streams):
    with pytest.raises(ValueError, match="predictions|streams"):
        G.vote(torch.tensor(predictions), torch.tensor(stream), streams)


# Pictures

def test_pictures(streams):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = G.plot_clouds(streams[:3], columns=2)
    assert len(figure.axes) == 6
    assert len(G.plot_windows(streams[0], window=300, step=100).axes) == 2
    plt.close("all")


def test_cache_entry_is_plain(tmp_path):
    G.simulate_gestures("test", users=1, seconds=0.1, progress=False, cache=tmp_path)
    (path,) = (tmp_path / "gestures").glob("*.npz")
    arrays = load_arrays(path)
    assert arrays["place"].dtype == np.uint16 and arrays["place"].max() < 2**15 and len(arrays["label"]) == 11
