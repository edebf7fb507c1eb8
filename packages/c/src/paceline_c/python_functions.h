/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of Python's stable ABI that paceline.c calls, in a table that it fills when it has found a Python. */
#include <stdarg.h>
#include <stddef.h>
#include <wchar.h>

typedef struct _object PyObject;

#define PYTHON_FUNCTIONS(X)                                   \
  X(int, Py_IsInitialized, (void))                            \
  X(void, Py_InitializeEx, (int))                             \
  X(void, Py_SetProgramName, (const wchar_t *))               \
  X(wchar_t *, Py_DecodeLocale, (const char *, size_t *))     \
  X(void *, PyEval_SaveThread, (void))                        \
  X(int, PyGILState_Ensure, (void))                           \
  X(void, PyGILState_Release, (int))                          \
  X(PyObject *, PyImport_ImportModule, (const char *))        \
  X(PyObject *, PyObject_GetAttrString, (PyObject *, const char *)) \
  X(PyObject *, Py_VaBuildValue, (const char *, va_list))     \
  X(PyObject *, PyObject_CallObject, (PyObject *, PyObject *)) \
  X(int, PyArg_ParseTuple, (PyObject *, const char *, ...))   \
  X(void, PyErr_Fetch, (PyObject **, PyObject **, PyObject **)) \
  X(PyObject *, PyObject_Str, (PyObject *))                   \
  X(PyObject *, PyUnicode_AsUTF8String, (PyObject *))         \
  X(char *, PyBytes_AsString, (PyObject *))                   \
  X(void, PyErr_Clear, (void))                                \
  X(void, Py_DecRef, (PyObject *))

#define FIELD(type, name, arguments) type(*name) arguments;
static struct {
  PYTHON_FUNCTIONS(FIELD)
} py;
