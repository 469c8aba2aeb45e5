"""Adapters that let other projects run KDA through kda_core, one module for each project. Importing this package, or kda_core,
imports none of those projects: each module imports its project when that project loads it as a plugin, or when a caller registers it."""
