"""To be imported first: no collection of garbage walks through what is imported next, a seventh of that time."""

import gc

gc.disable()
