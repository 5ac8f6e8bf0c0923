"""To be imported last: no collection of garbage walks through what was there before, nor copies its pages in a fork."""

import gc

gc.collect()
gc.freeze()
gc.enable()
