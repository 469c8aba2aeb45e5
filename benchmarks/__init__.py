"""Benchmarks of the packages in this repository: cases, measurements, results and their pages.

==================  ==================================================================================
module              purpose
==================  ==================================================================================
run                 measures prefill and context parallelism on one GPU (command)
host                measures the host time of a call (command)
multi_gpu           measures one sequence over several GPUs (command, under torchrun)
repeated_keys       measures errors at the numerical limit of the chunked algorithm (command)
report              writes the pages and pictures of the results in docs/benchmarks (command)
cases               the shapes, and the tables that they belong to
implementations     the measured functions: backends of kda-core, and peers
measure             device time, host time, difference of two outputs
records             results files and the record of a run
report_prefill      the page of prefill
report_cp           the pages of context parallelism
report_host         the page of host times
plots               the pictures
==================  ==================================================================================
"""
