"""Adapters that make other projects call kda-core: one module for each project, named after its package. A module imports that
package, so nothing else in kda-core imports the module. `kda_core.fla` is the other direction: kda-core calls FLA."""
