"""Behind a loss: which calls, in which order, where their inputs come from, and where the samples are."""
