//! The field cases on templates and request forms.
