"""Whatever happens to the job, its trainers see the stream that one rank alone would have seen."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexfs.core.cursor import Cursor, Extent, Tail
from tenplexfs.core.order import Order
from tenplexfs.core.partition import Partition

EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 12)),
    st.tuples(st.just("degree"), st.integers(1, 8)),
    st.tuples(st.just("batch"), st.integers(1, 9)),
    st.tuples(st.just("fail"), st.floats(0, 1)),
    st.tuples(st.just("skip"), st.integers(0, 70)),
)


class SingleRank:
    """One rank with the whole order in a list, sample by sample; it knows nothing of cursors."""

    def __init__(self, extent, seed, batch):
        self.extent, self.seed, self.batch = extent, seed, batch
        self.epoch, self.taken = 0, 0
        self.end_epoch_when_no_batch_is_left()

    def end_epoch_when_no_batch_is_left(self):
        left = self.extent.count - self.taken
        if left == 0 or (left < self.batch and self.extent.tail is Tail.DROP):
            self.epoch, self.taken = self.epoch + 1, 0

    def step(self):
        ids = list(Order(self.extent.count, self.seed, self.epoch).span(0, self.extent.count))
        batch = ids[self.taken : self.taken + self.batch]
        self.taken += len(batch)
        self.end_epoch_when_no_batch_is_left()
        return [int(sample) for sample in batch]

    def skip(self, samples):
        for _ in range(samples):
            self.taken += 1
            if self.taken == self.extent.count:
                self.epoch, self.taken = self.epoch + 1, 0
        self.end_epoch_when_no_batch_is_left()

    def set_batch(self, batch):
        self.batch = batch
        self.end_epoch_when_no_batch_is_left()


class Job:
    """Ranks that read rows of their files, from the cursor of the generation on, as the mount shows them."""

    def __init__(self, extent, seed, batch):
        self.extent, self.uneven = extent, True
        self.saved = {0: Cursor(0, 0, batch, seed).settle(extent)}
        self.step, self.degree = 0, 1
        self.reconfigure(self.saved[0])

    def reconfigure(self, cursor):
        """A new generation: the only time that row 0 moves."""
        self.cursor = self.saved[self.step] = cursor
        self.began = self.step
        self.degree = min(self.degree, cursor.global_batch)
        self.open(cursor.epoch)

    def open(self, epoch):
        self.part = Partition.of(self.cursor.start_of(epoch), self.extent, degree=self.degree, uneven=True)
        self.number = 0

    def train(self):
        if self.number == self.part.batches:
            self.open(self.part.start.epoch + 1)
        rows = []
        for rank in map(self.part.rank, range(self.degree)):
            rows += rank.span(rank.end_of(self.number), rank.end_of(self.number + 1)).tolist()
        self.number += 1
        self.step += 1
        self.saved[self.step] = self.cursor.advance(self.step - self.began, self.extent)
        return rows


@settings(max_examples=150, deadline=None)
@given(
    st.integers(9, 60),
    st.integers(1, 9),
    st.integers(0, 2**64 - 1),
    st.sampled_from(Tail),
    st.lists(EVENTS, max_size=25),
)
def test_exactly_once(count, batch, seed, tail, events):
    extent = Extent(count, tail)
    job, single = Job(extent, seed, batch), SingleRank(extent, seed, batch)
    trained, states = [], {}

    def remember():
        states[job.step] = (single.epoch, single.taken, single.batch, job.degree, len(trained))

    remember()
    for event, value in events:
        if event == "train":
            for _ in range(value):
                trained.append(job.train())
                assert trained[-1] == single.step()
                remember()
        elif event == "degree":
            job.degree = value
            job.reconfigure(job.saved[job.step])
        elif event == "batch":
            single.set_batch(value)
            job.reconfigure(job.saved[job.step].with_batch(value, extent))
        elif event == "skip":
            single.skip(value)
            job.reconfigure(job.saved[job.step].skip(value, extent))
        elif event == "fail":
            job.step = int(value * job.step)
            single.epoch, single.taken, single.batch, _, kept = states[job.step]
            del trained[kept:]
            job.reconfigure(job.saved[job.step])
        remember()
        assert (job.saved[job.step].epoch, job.saved[job.step].consumed) == (single.epoch, single.taken)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(8, 64), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=6), st.integers(0, 2**32)
)
def test_each_epoch_has_each_sample_once_through_any_resizes(batches, degrees, seed):
    extent = Extent(8 * batches, Tail.DROP)
    job = Job(extent, seed, 8)
    for epoch in range(2):
        seen = []
        for step in range(batches):
            if step * len(degrees) % batches < len(degrees):
                job.degree = degrees[step * len(degrees) // batches]
                job.reconfigure(job.saved[job.step])
            seen += job.train()
        assert sorted(seen) == list(range(extent.count)), epoch
