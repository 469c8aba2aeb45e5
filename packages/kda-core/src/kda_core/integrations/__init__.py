"""Adapters that make other projects call kda-core: one module for each project, named after its package. A module imports that
package when the project loads it as a plugin, or when a caller imports the module, so nothing else in kda-core imports the module.
`kda_core.fla` is the other direction: kda-core calls FLA."""
