"""Benchmarks of the packages in this repository: commands, results and their pages.

`kda_core.bench` measures: cases, implementations, times, errors. This package keeps the results of the project, and the measurements
that an installation does not need.

==================  ==================================================================================
module              purpose
==================  ==================================================================================
run                 measures prefill and context parallelism on one GPU (command)
training            measures training steps: forward and backward (command)
decode              measures serving: decoding, verification, prefill over a pool (command)
host                measures the host time of a call (command)
multi_gpu           measures one sequence over several GPUs (command, under torchrun)
repeated_keys       measures errors at the numerical limit of the chunked algorithm (command)
report              writes the pages and pictures of the results in docs/benchmarks (command)
rows                the rows of prefill and of context parallelism
plans               the plans of context parallelism, and calls with a given plan
mixed               prefill over a pool, alone and beside decoding
floor, rmw          the floor of decode: a read and a write of the same states, and its kernel
records             results files and the record of a run
report_prefill      the page of prefill
report_training     the page of training
report_decode       the page of serving
report_cp           the pages of context parallelism
report_host         the page of host times
pages               parts that the pages share
==================  ==================================================================================
"""
