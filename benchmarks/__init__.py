"""Benchmarks of the packages in this repository: cases, measurements, results and their pages.

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
cases               the shapes, and the tables that they belong to
implementations     the measured functions: backends of kda-core, and peers
measure             device time, host time, memory, difference of two outputs
rows                the rows of prefill and of context parallelism
steps               one training step: its times, its memory, the errors of its gradients
pools               the calls of decode over pools of states
mixed               prefill over a pool, alone and beside decoding
rmw                 a kernel that reads and writes states: the floor of decode
records             results files and the record of a run
report_prefill      the page of prefill
report_training     the page of training
report_decode       the page of serving
report_cp           the pages of context parallelism
report_host         the page of host times
plots               the pictures
==================  ==================================================================================
"""
