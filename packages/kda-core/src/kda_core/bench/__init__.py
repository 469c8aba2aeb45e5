"""Measurements of KDA on this machine: ``python -m kda_core bench``. The results of this project are made with the same modules.

===============  ==================================================================================
module           purpose
===============  ==================================================================================
cases            the shapes, and the tables that they belong to
implementations  the measured functions: backends of kda-core by name, and peers
peers            FLA, cuDNN frontend and FlashInfer: their calls, and where they run
measure          device time, host time, memory, difference of two outputs
prefill          rows of prefill
training         rows of training
steps            one training step: its times, its memory, the errors of its gradients
decode           rows of decoding: calls over pools of states
environment      device, driver and versions
markdown, plots  tables and pictures
===============  ==================================================================================
"""
